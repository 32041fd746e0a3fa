"""What users and passes write against: action protocols, rules, records."""
