"""One decoder for a dozen families, as pure functions over a tree of parameters."""
