"""The relay: a process that holds the connections of containers for the daemon.

A container can send open files with its bytes. A reader that wants none of them still closes them,
as does the end of a connection with unread ones: and the close of a TCP socket with SO_LINGER takes
as long as its sender wants. A daemon that read or closed such a connection would stop, and with it
the kubelet. This process may stop: a timer interrupts each such close, and where that does not
help, the daemon kills this process, for the kernel lets no ending process linger.

It is started by the path of this folder, and knows the standard library and the modules here alone,
so that it stays small:

    python -I -S …/pod_api/relay SOCKET PROC NAME=NUMBER …

Its standard input is a socket of whole messages to the daemon, which sends nothing. The messages
are `listening`, `failed TEXT`, now and then `alive`, and for each call `call PID` with two
descriptors: a connection that carries the caller's bytes, and the caller's pidfd. PID is 0, and
there is no pidfd, where the caller is in a pid namespace that this process does not see.
"""
