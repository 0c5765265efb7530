"""Before you pay: what a recipe says, what can be rented, how long it takes, and what it costs at most."""
