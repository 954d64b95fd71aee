"""Pages that show what a run did, made from the files that the run left behind.

``run_data``    reads a run folder: configuration, metrics, samples, summary
``figures``     one visual style for every plot, as SVG for pages and PNG for documents
``panels``      what is plotted: one small function a panel
``html``        one page without outside resources, readable in light and dark
``run_report``  the page of one run
``compare``     the page of several runs side by side

Nothing here imports torch: a report can be made on any machine from copied files.
"""
