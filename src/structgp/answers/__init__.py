"""From a posterior to answers: each an average over joint draws of (f, g), exact under each draw."""
