"""Weight sync from training to rollout engines. See docs/weight_sync.md."""
