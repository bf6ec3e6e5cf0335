"""Who is accepted, in which order they wait, when they start, how many tokens a step gives them, when their blocks go."""
