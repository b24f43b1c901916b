"""What checks compare training with: rewards, losses and updates in plain float64."""
