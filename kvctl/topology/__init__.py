"""The topology file: its models, its errors, and the plan that follows from it."""
