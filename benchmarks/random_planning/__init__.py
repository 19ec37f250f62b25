"""What ``random_plans.py`` is made of: draws of matches, plans of them, their builds, and what became of them."""
