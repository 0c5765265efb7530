"""One instance, judged: whose it is, whether it is what was agreed to, and whether there is an extra one."""
