"""The load generator of ``giornata bench serve``: edits arrive by chance, as in production.

Read in this order:

* `facts` and `distributions` - what is known of production, and how to draw from it
* `workload`, `trace` and `schedule` - which edits are asked for and when: drawn, or read from a file
* `pictures` - their files
* `driver` and `images_api` - send them when they are due, and read answers
* `outcomes` - what became of them, and its figures
* `report`, `charts` and `drawing` - how it is told
"""
