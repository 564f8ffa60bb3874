# SPDX-License-Identifier: Apache-2.0
"""DDTREE: tree speculative decoding on top of DFLASH (Diffusion Draft Tree, arXiv 2604.12989).

    args          server arguments: validation, both widths, what the DFLASH handler sees
    given         what arguments are given as: on a command line, in Python, out of JSON
    budgets       which budgets an engine verifies, or lets `auto` choose among
    default_budget  what is served when no budget is given: `auto`, or a fixed one and why
    flags         the command line
    features      what is refused until it is proven
    hybrid        models with recurrent layers: what is proven of them
    gates         what DDTREE refuses once the model is loaded, and the graph buffers its width needs
    target_backend  what verifies, as SGLang chose it; `request_length`: the longest request that is admitted
    lanes         several verify widths in one engine: backends, graphs, shared buffers
    lane_sizes    for which batch sizes a lane is captured
    lane_parts    how this release captures a lane's graphs; `lane_width`: where it reads the width
    lane_bytes    what graphs take, those of several lanes together; `shared_graphs`, `shared_logits`: what they share;
                  `promised`: memory that the drafter will need
    recapture     weight updates that ask for new graphs
    choosing      which lane a step takes; what a request may ask for
    auto          the choice made while serving, the same on every rank; `auto_setup`: what it is made of
    choice        which width and shape promise most tokens a millisecond; `accept_rates`, `round_times` and
                  `bucket_times`: from what
    observing     what steps take and tell, without waiting for the device; `tally`: what a step tells of every width
    start_up_times  what a step costs in every lane, by replays at a start; `start_up_bounds`: what that allows later
    report        log, metrics and `/server_info`
    plain_forward  the target's forward of a step that drafts nothing; `plain_step`: the first worker's, by the names of
                  this release; `plain_steps`: the second worker's, `kept_states`: the hidden states of its graphs
    replica       which data-parallel replica a process serves, for the labels of metrics
    ready         the line in the log at the end of a start
    capturing     how graphs are captured behind SGLang's own: on their stream, without the user's hooks
    memory        what each budget costs, told at a start
    graph_memory  bytes of a node's graph buffers, and bytes that are free
    draft_head    draft hidden states -> top-k log-probabilities per draft position
    draft_model   what the drafter needs set right before a tree is drafted with it
    calibration   exponents that make the drafter's probabilities those of a tree, fitted while serving;
                  `calibration_args`: what its flag may say; `calibration_report`: what operators see
    tree          log-probabilities -> best-first trees of fixed shape
    topology      padding of replayed graphs, as the kernels of recurrent layers need it counted
    accept        trees and target tokens -> accepted paths
    targets       verify logits -> one target token per node, greedy or sampled
    tree_attention  the attention of verify and draft steps by `attention_kernel`, where it knows all that is asked
    kv_move       accepted nodes' KV to the front of a request's slots, for pages of more than one
    tree_mask     the ancestor mask, written without a length from the device
    *_reference   what a kernel has to give, by tensor operations
    *_kernel      the same in one launch, on a GPU
    commit        an accepted path in the shapes of a DFLASH step
    captured_head the draft head inside the draft's CUDA graph (0.5.15 and later)
    slots         which slots a step verifies in; `draft_slots`: where the draft KV of what it commits goes
    placing       the first worker: a step's slots sorted on the device, before the host knows what was accepted
    drafting      the first worker: the draft of a step; `draft_pools`: what its forward batch carries; `draft_kv`: the
                  drafter's KV of what was committed; `emitting`: what a step appends to its requests
    held_slots    slots that a request holds beside its committed tokens
    host_copies   copies that nobody waits for, or waits for late
    step_mask     where a step's mask is written
    draft_kv_graphs  the second worker: the draft KV of a step in one CUDA graph
    stages        times of a step's stages; `moments`: CUDA events, used again and again
    launching     launches of kernels that cost the host little
    warming       every kernel of a step compiled at start-up; `warming_parts`: those of one generation
    verify_input  one verify step of a batch (one variant a generation): the first worker's commits it as well
    worker        the DFLASH worker with the chain replaced by a tree (one variant a generation)
    judging       the second worker: a step from the target's forward on
    penalties     the second worker: penalties of the root, exact with overlap scheduling
    earlier_output  what a retracted request has said before, for its penalties
    grammar       the second worker: what each node's next token may be
    room          the second worker: slots, columns and lengths for what is reserved ahead
    requests      the second worker: requests that a tree does not serve
    ending        the second worker: where within a step a request ends
    drafter_weights  the second worker: what a weight update leaves alone, and which one is refused
    settings      how arguments are read and set while SGLang completes them
    published     the arguments of this process, once they are complete
    proven        what was seen to agree with plain decoding (one variant a generation)
    model_facts   what is known of the target before it is loaded
    recurrent     which models have recurrent layers; `cached_states`: how the prefix cache keeps their states
    drawing       how the engine's sampler draws; `nan_logits`: what plain decoding does with NaN
    processed     which requests have a custom logit processor
    finishing     the first worker: when a request is finished; `counting`, `recurrent_commit`: what else it calls by
                  other names in other releases
    draft_scope   the second worker: where the draft is built; `draft_arguments`, `draft_state`, `reserved`, `plans`,
                  `mask_buffers`, `logprobs`: what else is done otherwise in other releases
    overlay_id    which overlay this is; made by `ddtree-overlay patch`
    trace         a JSON line per verified tree, for tests and debugging

`tree`, `tree_mask`, `accept` and `commit` know tensors alone; only `verify_input` and `worker` know the scheduler.
Nothing is imported here: server arguments are parsed in processes that never touch a model.
"""
