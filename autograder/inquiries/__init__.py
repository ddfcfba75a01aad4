"""Students' questions about their grades, as files that both sides can read years later."""
