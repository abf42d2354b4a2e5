"""Servers of exported folders: started, asked as a client asks, and compared with zoo's own model."""
