"""The interface of users and passes: action protocols, rules, records."""
