"""How much a method owes to the windows it was calibrated on."""
