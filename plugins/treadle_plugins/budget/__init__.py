"""How many tokens a step computes, and for whom."""
