"""Why a step failed, and what a training run shows: values in, findings out."""
