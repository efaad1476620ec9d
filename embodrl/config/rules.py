def run_rules(config, tree, pruned):
    return [], []
