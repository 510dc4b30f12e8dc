"""From judged rows to stage, layer and candidate results, verdicts and gates."""
