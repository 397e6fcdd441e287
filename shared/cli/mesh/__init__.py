"""A whole mesh on one machine: which processes it is made of, keeping them alive, and watching them."""
