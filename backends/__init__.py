"""The backends in the tree. Each registers through the same entry points that anyone else's uses."""
