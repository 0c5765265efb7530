"""Contains one file per command. A command imports what it needs only when it runs, so that help is instant."""
