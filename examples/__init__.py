"""Training scripts for each framework and launcher. The plain one is `dcp_s3.demo.train`."""
