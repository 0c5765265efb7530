"""Before you pay: what a recipe says, what can be rented, how long it takes, what it costs at the worst."""
