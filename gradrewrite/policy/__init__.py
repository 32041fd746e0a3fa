"""The interface of users and passes: insertions, rules, records."""
