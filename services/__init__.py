"""The five services of the mesh. They never import each other; they meet in `shared.messages`."""
