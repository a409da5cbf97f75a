"""Power limits of this machine's boards: read, set, restored whatever happens, and signs of sick boards."""
