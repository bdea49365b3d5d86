"""The RL loop and the Ray actors it talks to."""
