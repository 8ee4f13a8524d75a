"""The engine environment: the pins it is installed from, and what is in the one at hand."""
