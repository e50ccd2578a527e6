"""What runs other stages: studies, stability, stages timed side by side."""
