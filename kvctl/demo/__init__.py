"""``kvctl demo``: a small real pair, real traffic, and answers compared with a single engine."""
