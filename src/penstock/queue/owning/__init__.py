"""Who owns which shard: leases, kept in the bucket."""
