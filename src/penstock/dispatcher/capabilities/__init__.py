"""What attempts may touch: the keys that sign tokens, what they grant, and who was refused."""
