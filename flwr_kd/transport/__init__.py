"""What travels between server and clients, and how it is sent."""
