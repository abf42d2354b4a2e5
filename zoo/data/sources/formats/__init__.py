"""Formats that rows may have; `choose` finds a row's format and turns the row into zoo's own `messages`."""
