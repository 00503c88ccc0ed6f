"""Templates: which recording an edit takes from, when a picture is recorded, where recordings are kept."""
