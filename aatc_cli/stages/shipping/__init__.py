"""What export writes beside the artifacts it copies."""
