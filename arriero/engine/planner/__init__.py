"""What a run costs before it is run: models of time and memory, plans, theory, and a simulator of the graph.

| module                                | answers                                                         |
|---------------------------------------|-----------------------------------------------------------------|
| `hardware`, `models`, `lengths`       | what runs where on what                                         |
| `costs`, `memory`, `decoding`, `flow` | seconds and bytes of one component, and of two side by side     |
| `problem`                             | LlamaRL's optimisation problem in both forms, solved            |
| `cycles`                              | the shortest step that any schedule of a graph can reach        |
| `split`, `plan`, `report`             | a split for a pipeline, a model and a cluster                   |
| `placement`, `reallocate`, `dispatch` | ReaL's plan search, StreamRL's dispatch and balancing           |
| `simulation`, `scenario`, `trace`     | the graph in simulated time (`sim_events`, `sim_bursts`)        |
| `calibrate`                           | component times from a recorded run, and what would change it   |

Nothing here imports torch; all of it is pure computation on frozen records.
"""
