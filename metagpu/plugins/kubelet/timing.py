"""Periods, deadlines and delays of everything between the kubelet and this daemon."""

from typing import Final

import msgspec


class KubeletTiming(msgspec.Struct, frozen=True):
    """All times in seconds.

    Attributes:
        connect_delay: the first delay while the kubelet's socket refuses connections. A starting
            kubelet binds its socket first and listens a moment later.
        longest_connect_delay: the longest such delay, and the delay without a socket.
        connect_deadline: of one attempt to connect, which takes less than a millisecond.
        absence: the time without a kubelet until that is logged, once: a restart takes less, a
            wrong folder for ever.
        register_deadline: of a registration; the kubelet itself gives up dialling back after 10.
        list_deadline: from a registration to the kubelet's ListAndWatch, which it opens at once.
        failure_delay: before the third of two registrations that ended soon; it doubles with each
            more.
        refusal_delay: the first delay while the kubelet answers and refuses.
        longest_delay: the longest delay between two registrations.
        steady: the life of a registration after which the delays start again from none.
        flush_deadline: the wait of a refusal for the list that should precede it.
        linger: for a peer to close its connection after our streams have ended.
        poll_period: between two PodResources requests when nothing was granted.
        contended_period: the same while a lease makes other shares unavailable: a pod may be
            waiting for its end.
        settle: from a grant to the request that finds its pod: the kubelet lists the pod once it
            is admitted. It also keeps a burst of pods far below the kubelet's limit of 100
            requests a second.
        written: from a grant to the checkpoint that names it, on a node without a free processor.
            Those before name the last holder of the same ids, or nobody.
        after_end: from the end of a pod at the API server to the request. One request serves all
            pods that end at once.
        poll_deadline: of a PodResources request.
        readiness: of answers without a break, after which a restarted kubelet knows its pods.
        watch_period: between two looks at registrations.
        unlisted: the time without a list at the kubelet until that is reported.
        longest_attempt: the time in one step of a registration after which it is begun again; it
            exceeds every deadline and delay of such a step.
        comparison_period: between two comparisons of the kubelet's numbers with our lists, and
            from a difference that stays to the second registration.
        comparison_retry: from a difference to the comparison that confirms it.
        longest_comparison_delay: the longest delay between two registrations for a difference.
        pod_wait: the longest time that a preference of shares waits to know its pod, in a cluster
            whose pods name GPUs: the kubelet may hear of a pod a few milliseconds sooner.
        preferring: the time since the last pod that named a GPU in which there is such a wait.
    """

    connect_delay: float = 0.002
    longest_connect_delay: float = 1.0
    connect_deadline: float = 5.0
    absence: float = 5.0
    register_deadline: float = 15.0
    list_deadline: float = 10.0
    failure_delay: float = 0.05
    refusal_delay: float = 1.0
    longest_delay: float = 30.0
    steady: float = 10.0
    flush_deadline: float = 1.0
    linger: float = 1.0
    poll_period: float = 10.0
    contended_period: float = 2.0
    settle: float = 0.5
    written: float = 2.0
    after_end: float = 0.005
    poll_deadline: float = 5.0
    readiness: float = 60.0
    watch_period: float = 1.0
    unlisted: float = 5.0
    longest_attempt: float = 60.0
    comparison_period: float = 10.0
    comparison_retry: float = 2.0
    longest_comparison_delay: float = 300.0
    pod_wait: float = 0.02
    preferring: float = 600.0


TIMING: Final = KubeletTiming()
