"""Formats that rows may have; `choose` tells them apart and turns each into zoo's own `messages`."""
