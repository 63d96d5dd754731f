"""What a run costs before it is run: models of time and memory, plans, theory, and a simulator of the graph.

| module                         | answers                                                            |
|--------------------------------|--------------------------------------------------------------------|
| `hardware`, `models`, `lengths`| what runs where on what                                            |
| `costs`, `decoding`, `memory`  | seconds and bytes of one component in one parallel layout          |
| `problem`                      | LlamaRL's optimisation problem in both forms, solved exactly       |
| `cycles`                       | the shortest step that any schedule of a graph can reach           |
| `plan`, `placement`, `dispatch`| a split for a model and a cluster; ReaL's and StreamRL's options   |
| `simulation`                   | the graph, event by event or burst by burst, in simulated time     |
| `calibrate`                    | component times from a recorded run                                |

Nothing here imports torch; all of it is pure computation on frozen records.
"""
