"""What the selftest of doctor compares."""
