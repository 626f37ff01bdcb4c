"""Router: predicts what a call would cost on each instance and asks admission for the best place."""
