"""Where the experts of a replica go: cuts of their units over slots, by predicted seconds."""
