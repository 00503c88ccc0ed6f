"""How a pool of devices would keep deadlines: rules, baselines and a bound on a virtual clock."""
