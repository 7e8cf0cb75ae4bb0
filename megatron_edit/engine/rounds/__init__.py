"""One round: when replicas meet, what they tell each other, the plan, and its execution."""
