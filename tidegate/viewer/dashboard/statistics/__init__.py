"""Statistics of a run's episodes: distributions by step, and evaluations with intervals."""
