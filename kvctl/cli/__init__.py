"""The command line: one command a file, which parses, calls and renders."""
