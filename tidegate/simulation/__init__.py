"""What a run would do on other machines: the admission core of real runs in a simulated world."""
