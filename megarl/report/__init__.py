# SPDX-License-Identifier: Apache-2.0
"""Write runs as one self-contained HTML page. Nothing here is computed from weights: it reads run folders."""
