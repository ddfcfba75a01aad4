"""Keep students' questions about their grades as files that can still be read years later."""
