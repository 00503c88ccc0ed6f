"""The models that come with the project: what they are shown, how they are trained, and how they are judged."""
