"""Built-in web server: the dashboards over any Prometheus, and runbooks at /runbooks/<AlertName>.

    view.py        what a page's address asks for: time range and choices                                 pure
    charts.py      a panel and Prometheus' answers -> what is drawn; the page's JavaScript draws it       pure
    marks.py       annotations -> lines and regions                                                       pure
    options.py     variables -> what to ask and what to offer                                             pure
    pages.py       HTML: the shell of a board, runbook pages                                              pure
    serve.py, snapshot.py   the live page; one static file of it. Both ask through exporters/net/prometheus.py

Invariant: the browser names boards, panels and choices, never PromQL. Labels are foreign text wherever they are
shown."""
