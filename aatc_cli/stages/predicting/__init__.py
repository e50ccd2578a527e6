"""whiten with prediction: maps fitted in closed loop, over passes through all layers."""
